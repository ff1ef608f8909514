"""`python -m t2n_hf` is the `t2n-hf` program."""

from t2n_hf_command import main

if __name__ == "__main__":
    main()
