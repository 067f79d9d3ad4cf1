"""Models: loading, the embedded tiny ones, and packing that cannot leak."""
