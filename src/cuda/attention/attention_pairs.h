/* attention_pairs.h - the pairs (kind of K codes, kind of V codes) that have an attention kernel.
 * Tile kernels and any/ serve others.
 *
 * A kernel is compiled per pair and head_dim, so the list is a choice:
 *
 *   a kind with itself
 *   keys with values of any kind of at most as many bits, because at equal bits keys are worth
 *     about four times as much as values
 *   groups of tokens or channels as in use: kivi, innerq (hybrid groups have the same kinds)
 *   groups of one sort with themselves
 *   codes of several channels with their own kind, of sizes in use
 *   a trellis with a trellis of at most as many bits
 *   keys with a codebook of 6 bits with a trellis of 4 bits: the preset "quality"
 *   keys with a codebook of 6 bits with a codebook of 4 bits: vLLM's kvant_fast
 *   keys of 8 bits with a trellis of 4 and of 3 bits: the first layer of presets in vLLM
 *
 * CMake reads this file too: every X(K kind, V kind) with kinds of capital letters becomes a source
 * file, so that pairs compile in parallel. */
#pragma once

/* clang-format off */
#if KVANT_PAPERS
#define KVANT_CUDA_PAPER_PAIRS(X) \
    X(Octopus2, Octopus2) \
    X(Octopus3, Octopus3) \
    X(Octopus4, Octopus4) \
    X(HqmqS96R4, HqmqS96R4)
#else
#define KVANT_CUDA_PAPER_PAIRS(X)
#endif

#define KVANT_CUDA_ATTENTION_PAIRS(X) \
    KVANT_CUDA_PAPER_PAIRS(X) \
    X(Uniform8, Uniform8) \
    X(Uniform8, Uniform4) \
    X(Uniform8, Codebook4) \
    X(Uniform8, Codebook3) \
    X(Uniform8, Codebook2) \
    X(Uniform8, Trellis4) \
    X(Uniform8, Trellis3) \
    X(Uniform4, Uniform4) \
    X(Uniform4, Codebook4) \
    X(Uniform4, Codebook3) \
    X(Uniform4, Codebook2) \
    X(Codebook4, Codebook4) \
    X(Codebook4, Uniform4) \
    X(Codebook4, Codebook3) \
    X(Codebook4, Codebook2) \
    X(Codebook6, Codebook4) \
    X(Codebook3, Codebook3) \
    X(Codebook3, Codebook2) \
    X(Codebook2, Codebook2) \
    X(Uniform4, Uniform2) \
    X(Uniform3, Uniform3) \
    X(Uniform2, Uniform2) \
    X(Uniform2Tokens32, Uniform2Channels32) \
    X(Uniform3Channels32, Uniform3Tokens32) \
    X(Uniform3Channels32, Uniform2Tokens32) \
    X(Uniform8Channels, Uniform8Channels) \
    X(Uniform3Channels32, Uniform3Channels32) \
    X(Uniform2Channels32, Uniform2Channels32) \
    X(Uniform4Channels, Uniform4Channels) \
    X(Uniform4Tokens, Uniform4Channels) \
    X(Uniform4Tokens, Uniform4Tokens) \
    X(Trellis4, Trellis4) \
    X(Trellis4, Trellis3) \
    X(Trellis4, Trellis2) \
    X(Trellis3, Trellis3) \
    X(Trellis3, Trellis2) \
    X(Trellis2, Trellis2) \
    X(Codebook6, Trellis4)
/* clang-format on */
