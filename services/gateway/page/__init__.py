"""The page that people open in a browser: files of the package, which hold no data."""
