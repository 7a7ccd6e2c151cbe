"""Pipelines: tables of what each rank computes and sends, their proof, and the program of a rank."""
