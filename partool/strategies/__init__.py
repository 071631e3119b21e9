"""Records of the strategies that specs can name: data without code, which all other packages may read."""
