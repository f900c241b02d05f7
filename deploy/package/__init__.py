"""Makes the packages: deb, rpm and tar.gz."""
