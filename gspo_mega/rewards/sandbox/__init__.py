"""Runs programs from responses behind walls."""
