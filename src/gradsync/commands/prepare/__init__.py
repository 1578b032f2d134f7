"""Texts: prepared as token files, or tokenized while a run reads them."""
