"""What the gateway serves to browsers: the page, and the description of its interface to read."""

from fastapi import FastAPI

from flotilla.services.gateway.page.files import add_page
from flotilla.services.gateway.page.reference import add_reference_page


def add_pages(app: FastAPI) -> None:
    """Serve both; neither is part of the interface that is described."""
    add_page(app)
    add_reference_page(app)
