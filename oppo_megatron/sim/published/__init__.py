"""Plans and times that others have published, and how near the laws come to them."""
