"""Where weights live: what they take, device maps, budgets, and refusing what cannot fit. Nothing is loaded here.

`device_map` is the map that the user meant; `needs` says what each module takes, `cache_size` what keys and values do,
`machine` what there is; `infer` makes maps of it, and `preflight` says what will sit where before anything is loaded.
"""

__all__: list[str] = []
