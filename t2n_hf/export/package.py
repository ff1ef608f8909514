"""The export folder: archive, configuration, tokenizer, licence, card and manifest."""
