/* families.h - the list of codec families: a codec exists when it has a line here.
 *
 * X(name) stands for `const kvant_family kvant_family_name` in the family's own file. Listings keep
 * this order. -DKVANT_PAPERS=OFF leaves out the families of codec/papers. */
#pragma once

#ifndef KVANT_PAPERS
#define KVANT_PAPERS 1 /* the build says 0 for -DKVANT_PAPERS=OFF */
#endif

#if KVANT_PAPERS
#define KVANT_PAPER(X, name) X(name)
#else
#define KVANT_PAPER(X, name)
#endif

#define KVANT_FAMILIES(X)                                                                          \
    X(f32)                                                                                         \
    X(f16)                                                                                         \
    X(bf16)                                                                                        \
    X(int)                                                                                         \
    X(bdr)                                                                                         \
    KVANT_PAPER(X, kivi)                                                                           \
    KVANT_PAPER(X, innerq)                                                                         \
    KVANT_PAPER(X, kmeans)                                                                         \
    KVANT_PAPER(X, hessian)                                                                        \
    X(turboquant)                                                                                  \
    X(trellis)                                                                                     \
    KVANT_PAPER(X, polar)                                                                          \
    KVANT_PAPER(X, octopus)                                                                        \
    KVANT_PAPER(X, hqmq)                                                                           \
    KVANT_PAPER(X, naive)                                                                          \
    KVANT_PAPER(X, spherical)                                                                      \
    KVANT_PAPER(X, addvq)
