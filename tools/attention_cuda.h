/* attention_cuda.h - the subject of `kvant bench cuda`. */
#ifndef KVANT_TOOLS_ATTENTION_CUDA_H
#define KVANT_TOOLS_ATTENTION_CUDA_H

#include "attention_bench.h"
#include "gpu.h"

/* A call reads one query token a sequence. The error of its first head is that against double precision over the decoded
 * pages. */
bool attention_cuda(attention_subject *subject, const attention_inputs *inputs, const gpu *g, const char *k,
                    const char *v);

#endif /* KVANT_TOOLS_ATTENTION_CUDA_H */
