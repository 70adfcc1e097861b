"""Episodes whose environment exists already: Gymnasium's text environments, OpenEnv servers."""
