"""Isolated calls against the live step: do they add up?"""
