"""HTTP code that commands and servers share."""
