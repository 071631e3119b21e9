"""A tracker whose package never finishes to load."""

import time

time.sleep(600)
