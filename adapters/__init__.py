"""One folder a framework, one file a feature. The package is `wanshim.adapters`, by the link in wanshim/."""

if __name__ != "wanshim.adapters":
    # A checkout on the path offers this folder as `adapters` too; imported twice, a feature would hold two states.
    raise ImportError(f"{__name__} is wanshim.adapters: import that")
