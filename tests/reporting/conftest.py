"""A real browser for the pages: Debian's chromium, driven by playwright, without a network."""

import shutil

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def pytest_collection_modifyitems(items):
    """A browser is a process that is started: its tests are left out of `make quick`."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright, which drives the browser, is missing")
    if CHROMIUM is None:
        pytest.skip("there is no chromium to look at pages with (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Open a file as a reader would, offline; at the end nothing may have been complained about or asked for."""
    contexts, complaints = [], []

    def open(path, *, width=1440, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: complaints.extend([request.url] * (not request.url.startswith("file:"))))
        page.goto(path.absolute().as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield open
    for context in contexts:
        context.close()
    assert not complaints
