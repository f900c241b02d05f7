TARGETS = run check test demo lint generate lock neighbors bench package chart test-deploy test-fleet test-hardware test-lab test-nccl test-slurm fuzz soak docs
.PHONY: $(TARGETS)
$(TARGETS):
	@./dev $@
