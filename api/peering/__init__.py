"""The peers of a server: its links to other engines, and the requests that it computes for them."""
