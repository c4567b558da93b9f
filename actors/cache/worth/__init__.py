"""What a kept state is worth, and so which goes next."""
