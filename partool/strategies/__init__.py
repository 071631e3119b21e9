"""Records of the strategies that specs name: facts without code, which all other packages may read."""
