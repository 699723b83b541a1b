"""What all three ops share. Knows none of them."""
