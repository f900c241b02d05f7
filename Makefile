.PHONY: run test demo lint generate lock bench
run test demo lint generate lock bench:
	@./dev $@
