"""Facts about the strategies that specs can name; all other packages may import these records."""
