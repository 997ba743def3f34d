/* eval_values.h - the value of every scored token of an evaluation as a safetensors file, for
 * statistics that rows do not have.
 *
 * Configuration I is the I-th row's, 0 the f16 cache. Tensors "kld.I" and "nll.I" [chunks,
 * positions] are F64: KL divergence to the f16 cache, and -ln p of the token that follows. The
 * metadata "configuration.I" is the configuration's label.
 */
#ifndef KVANT_TOOLS_EVAL_VALUES_H
#define KVANT_TOOLS_EVAL_VALUES_H

#include "eval_run.h"

/* Of a complete evaluation. False after complaining; path is then as it was. */
bool eval_values_write(const eval_run *r, const char *path);

#endif /* KVANT_TOOLS_EVAL_VALUES_H */
