"""Chats: list, fork, rewind, edit, delete, suspend."""

from playwright.sync_api import expect

from tests.browser.driving import Tab


def test_fork_at_a_turn(tab: Tab) -> None:
    tab.talk("My name is Clara.", "What is my name?")
    whole = tab.session
    tab.turns.first.hover()
    tab.button("Fork at turn 1", turn=1).click()
    tab.sees("Forked at turn 1.")
    expect(tab.turns).to_have_count(1)
    assert tab.session != whole
    assert tab.stored()["parent"] == {"session": whole, "turn": 1}
    assert tab.talk("Hello!")[-1] == "Hello, Clara! How can I help you?"
    tab.button("Forked at turn 1 of another chat").click()
    expect(tab.turns).to_have_count(2)
    assert tab.session == whole
    assert tab.answers()[-1] == "Your name is Clara."


def test_a_fork_while_an_answer_is_written_has_the_turns_before(tab: Tab) -> None:
    tab.talk("My name is Clara.")
    tab.begin_long()
    tab.button("Fork at turn 1", turn=1).click()
    expect(tab.button("Forked at turn 1 of another chat")).to_be_visible()
    expect(tab.turns).to_have_count(1)
    expect(tab.writing).to_have_count(0)
    assert tab.talk("What is my name?")[-1] == "Your name is Clara."
    tab.page.go_back()
    expect(tab.writing).to_be_visible()
    tab.page.keyboard.press("Escape")
    tab.sees("Stopped")


def test_rewind_asks_first(tab: Tab) -> None:
    tab.talk("My name is Clara.", "What is 7 plus 5?", "What is my name?")
    tab.turns.first.hover()
    tab.button("Rewind to turn 1", turn=1).click()
    tab.sees("2 later turns will be forgotten. A fork keeps them.")
    tab.button("Cancel").click()
    expect(tab.turns).to_have_count(3)
    tab.button("Rewind to turn 1", turn=1).click()
    tab.page.locator("#confirm").get_by_role("button", name="Rewind", exact=True).click()
    expect(tab.turns).to_have_count(1)
    assert tab.stored()["turn"] == 1
    assert tab.talk("What is my name?")[-1] == "Your name is Clara."


def test_edit_asks_differently_from_the_first_turn_on(tab: Tab) -> None:
    tab.talk("My name is Clara.", "What is my name?")
    tab.turns.first.hover()
    tab.button("Edit", turn=1).click()
    tab.page.locator("#confirm").get_by_role("button", name="Rewind", exact=True).click()
    expect(tab.box).to_have_value("My name is Clara.")
    expect(tab.turns).to_have_count(0)
    assert tab.talk("My name is Naomi.", "What is my name?")[-1] == "Your name is Naomi."


def test_edit_in_a_fork_keeps_the_chat(tab: Tab) -> None:
    tab.talk("My name is Clara.", "What is my name?")
    whole = tab.session
    tab.turns.first.hover()
    tab.button("Edit", turn=1).click()
    tab.button("Fork instead").click()
    expect(tab.turns).to_have_count(0)
    expect(tab.box).to_have_value("My name is Clara.")
    assert tab.session != whole
    assert tab.server.get(f"/v1/sessions/{whole}")["turn"] == 2


def test_the_list_leads_from_chat_to_chat(tab: Tab) -> None:
    tab.talk("My name is Clara.")
    first = tab.session
    tab.box.fill("half a thought")
    tab.page.get_by_role("button", name="New chat").click()
    expect(tab.box).to_have_value("")
    tab.talk("What are you?")
    rows = tab.page.locator("#chats .chat")
    expect(rows.nth(0)).to_contain_text("What are you?")
    expect(rows.nth(0)).to_have_attribute("aria-current", "page")
    tab.page.locator(f"[data-id='{first}']").click()
    expect(tab.page.locator("#title")).to_have_text("My name is Clara.")
    expect(tab.box).to_have_value("half a thought")
    assert tab.answers() == ["Nice to meet you, Clara!"]
    tab.page.go_back()
    expect(tab.page.locator("#title")).to_have_text("What are you?")


def test_delete(tab: Tab) -> None:
    tab.talk("My name is Clara.")
    gone = tab.session
    tab.button("Delete this chat").click()
    tab.page.locator("#confirm").get_by_role("button", name="Delete", exact=True).click()
    tab.sees("Deleted.")
    expect(tab.page.locator(f"[data-id='{gone}']")).to_have_count(0)
    expect(tab.page.get_by_role("heading", name="Say something")).to_be_visible()
    assert tab.server.status(f"/v1/sessions/{gone}") == 404


def test_suspend(tab: Tab) -> None:
    tab.talk("My name is Clara.")
    tab.button("Suspend this chat").click()
    tab.sees("Suspended: its state is")
    assert tab.talk("What is my name?")[-1] == "Your name is Clara."


def test_an_address_that_names_no_chat(tab: Tab) -> None:
    tab.open("/#%")
    expect(tab.page.get_by_role("heading", name="Say something")).to_be_visible()
    assert tab.talk("My name is Clara.") == ["Nice to meet you, Clara!"]


def test_an_id_with_a_percent_sign(tab: Tab) -> None:
    tab.server.post("/open_session", {"capacity_of_str_len": 9, "session_id": "100%", "streaming": True})
    tab.open("/#100%25")
    tab.talk("My name is Clara.")
    tab.button("New chat").first.click()
    tab.page.locator("[data-id='100%']").click()
    assert tab.session == "100%25"
    tab.page.reload()
    expect(tab.turns).to_have_count(1)
