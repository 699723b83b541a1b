"""Code that all ops share. It imports none of them."""
