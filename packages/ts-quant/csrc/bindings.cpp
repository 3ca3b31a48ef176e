// The module: each codec binds its own functions (bind_<codec>.cpp).
#include "bindings.h"

NB_MODULE(_C, m) {
  ts::init_module(m);
  ts::quant::bind_bnb(m);
  ts::quant::bind_fp_published(m);
  ts::quant::bind_gguf(m);
  ts::quant::bind_groups(m);
  ts::quant::bind_fp8(m);
  ts::quant::bind_int8(m);
  ts::quant::bind_nested(m);
  ts::quant::bind_nf4(m);
  ts::quant::bind_nvfp4(m);
  ts::quant::bind_operands(m);
}
