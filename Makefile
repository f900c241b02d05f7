TARGETS = run test demo lint generate lock bench package test-deploy test-fleet test-nccl soak
.PHONY: $(TARGETS)
$(TARGETS):
	@./dev $@
