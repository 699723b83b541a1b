"""Code that all three ops share. It imports none of them."""
