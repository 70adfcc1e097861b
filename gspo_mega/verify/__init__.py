"""Commands that check the numbers: certify, mismatch (`gspo-mega mismatch`), compare, simulate."""
