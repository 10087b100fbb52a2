"""A report as one page that needs nothing else: for a browser, on a desk or a phone, without network."""

from parity.page.write import known_page, write_page

__all__ = ["known_page", "write_page"]
