"""NSA inside other libraries. Each module needs the library in its name; the rest of nsa imports none of them."""
