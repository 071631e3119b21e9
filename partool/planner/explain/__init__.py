"""Why a layout was taken and others were not, in words."""
