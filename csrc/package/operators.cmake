# The documented variables, and what each asks for: NAME of deepspeed/ops/op_builder/registry.py, then
#   native   code in this library          served   Python over torch or Triton: nothing to build          none   not there yet
# tests/unit/ops/test_native_package.py holds this table and the registry together.
set(DS_OPERATORS
  "AIO async_io native"
  "CCL_COMM deepspeed_ccl_comm none"
  "CPU_ADAGRAD cpu_adagrad native"
  "CPU_ADAM cpu_adam native"
  "CPU_LION cpu_lion native"
  "EVOFORMER_ATTN evoformer_attn none"
  "FP_QUANTIZER fp_quantizer none"
  "FUSED_ADAM fused_adam served"
  "FUSED_LAMB fused_lamb native"
  "FUSED_LION fused_lion served"
  "GDS gds none"
  "NOT_IMPLEMENTED deepspeed_not_implemented none"
  "PIN_MEMORY pin_memory served"
  "QUANTIZER quantizer native"
  "RANDOM_LTD random_ltd none"
  "SHM_COMM deepspeed_shm_comm served"
  "SPARSE_ATTN sparse_attn none"
  "TRANSFORMER transformer none"
  "TRANSFORMER_INFERENCE transformer_inference none")
