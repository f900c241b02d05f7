"""The configuration: sections and collectors, found where packages declare them; flags."""
