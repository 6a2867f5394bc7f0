"""What all codecs share: the interface of a field's codec, and the lossless bytes of one chunk.

No codec lives here and no file is touched: arrays in, bytes out.
"""
