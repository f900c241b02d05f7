.PHONY: run test lint generate lock bench
run test lint generate lock bench:
	@./dev $@
