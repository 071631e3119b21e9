"""Token caches: files of texts, conversations or tokens as arrays of tokens; nothing here needs torch."""
