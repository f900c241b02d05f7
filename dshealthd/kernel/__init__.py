"""What the Linux kernel tells: its log, its sockets, its mounts; parsers and readers that the collectors use."""
