"""NSA inside other libraries. Each module needs the library that it is named after, and nothing of nsa needs them."""
