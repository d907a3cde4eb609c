"""The demo's prompt: a long, fixed policy and one question about it, as a customer-service bot has it."""

from __future__ import annotations

_TOPICS = (
    ("returns", "an item", "30 days", "in its original packaging with the receipt"),
    ("exchanges", "a garment", "45 days", "unworn and with all labels attached"),
    ("refunds", "a payment", "5 working days", "to the card or account it came from"),
    ("deliveries", "a parcel", "3 working days", "to the address given in the order"),
    ("warranty claims", "a device", "24 months", "with the serial number readable"),
    ("price matches", "a product", "14 days", "against a shop that has it in stock"),
    ("gift cards", "a balance", "36 months", "in any shop and on the website"),
    ("loyalty points", "a balance", "12 months", "once the purchase can no longer be returned"),
    ("subscriptions", "a plan", "1 month", "from the account page without giving a reason"),
    ("repairs", "an appliance", "10 working days", "at the workshop nearest to the customer"),
)
_CHANNELS = ("by telephone", "by electronic mail", "in the chat window", "at the counter", "through the application")
_RULES = (
    "A customer who asks about {topic} {channel} is told that {thing} is accepted within {time}, {how}.",
    "If more than {time} have passed, explain the rule for {topic} politely and offer to ask a supervisor.",
    "Write down the order number before anything is promised about {topic}, also when the request comes {channel}.",
    "Never state that {topic} are free of charge unless the order was placed in the last {time}.",
)
OPENING = (
    "You are the assistant of Harbour Lane, a shop for household goods. Follow the policy below in every answer. "
    "Answer in one or two short sentences and do not invent anything that is not in the policy.\n\nPolicy\n"
)
QUESTION = "How many days do I have to return an item, and what do I need to bring?"


def policy(rules: int) -> str:
    """The first ``rules`` numbered rules of the policy; about 33 tokens each, always the same."""
    lines = []
    for number in range(rules):
        topic, thing, time, how = _TOPICS[number % len(_TOPICS)]
        template = _RULES[number // len(_TOPICS) % len(_RULES)]
        channel = _CHANNELS[number // (len(_TOPICS) * len(_RULES)) % len(_CHANNELS)]
        lines.append(f"{number + 1}. " + template.format(topic=topic, thing=thing, time=time, how=how, channel=channel))
    return OPENING + "\n".join(lines)
