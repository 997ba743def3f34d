/* tensor_hooks.h - unstable: what kvant's llama.cpp plug-in and kvant's tests ask of a tensor beyond
 * tensor.h.
 *
 * The plug-in keeps pages on a GPU by itself and takes from a tensor in the computer's memory what it
 * learned. These functions may change or go with every release, also between patch versions. A
 * program that uses them has to be compiled with the headers of the libkvant that it loads. Threads
 * as in tensor.h.
 */
#ifndef KVANT_TENSOR_HOOKS_H
#define KVANT_TENSOR_HOOKS_H

#include <kvant/tensor.h>

KVANT_BEGIN_C

/* By what keys turn at a position: cosines of a head's pairs of channels, then sines, head_dim numbers. pairs: NULL, or head_dim
 * numbers, two channels each. KVANT_ERR_ARGUMENT (an odd head_dim, too), KVANT_ERR_NONFINITE. */
KVANT_API kvant_status kvant_rope_phase(const kvant_rope *rope, uint32_t head_dim, int32_t position,
                                        float *phase, uint16_t *pairs);

/* As kvant_tensor_make_codec, one codec per kv head, of the matrices
 * that what was learnt so far gives for keys at positions `first` to `last`,
 * whatever n_positions the rope has: for the octaves ([0, 1024), [1024, 2048), [2048, 4096) ...) from that of first to that
 * of last, each of which counts as much as the others. stretch: 0, or so many positions have a centre of their own
 * (kvant_tensor_range_center) in place of the codecs', as the mean of keys turns, too: matrices are for keys about these.
 * likes and codecs: n_kv_heads; the caller frees the codecs, of which there are none on an error. A writer's call, which
 * changes nothing that is stored; takes a millisecond or two per kv head. KVANT_ERR_ARGUMENT, KVANT_ERR_MEMORY;
 * KVANT_ERR_UNSUPPORTED without transform=first or a rope, or before enough rows and queries came. */
KVANT_API kvant_status kvant_tensor_make_range_codecs(kvant_tensor *tensor, int32_t first,
                                                      int32_t last, uint32_t stretch,
                                                      const kvant_codec *const *likes,
                                                      kvant_codec **codecs, uint32_t n_threads);

/* The mean of keys at positions `first` to `last`, from what was learnt so far. center: n_kv_heads x head_dim. Errors as
 * above. */
KVANT_API kvant_status kvant_tensor_range_center(const kvant_tensor *tensor, int32_t first,
                                                 int32_t last, float *center);

KVANT_END_C

#endif /* KVANT_TENSOR_HOOKS_H */
