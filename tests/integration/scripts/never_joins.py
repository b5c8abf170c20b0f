"""Does not use the API at all."""

print("hello")
