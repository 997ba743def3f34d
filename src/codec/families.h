/* families.h - the one list of codec families: a codec exists when it has a line here.
 *
 * X(name) stands for `const kvant_family kvant_family_name`, defined in the family's own file. Listings keep this order. */
#ifndef KVANT_CODEC_FAMILIES_H
#define KVANT_CODEC_FAMILIES_H

#define KVANT_FAMILIES(X)                                                                                          \
    X(f32)                                                                                                         \
    X(f16)                                                                                                         \
    X(bf16)                                                                                                        \
    X(int)                                                                                                         \
    X(bdr)                                                                                                         \
    X(kivi)                                                                                                        \
    X(innerq)                                                                                                      \
    X(kmeans)                                                                                                      \
    X(hessian)                                                                                                     \
    X(turboquant)                                                                                                  \
    X(trellis)                                                                                                     \
    X(polar)                                                                                                       \
    X(octopus)                                                                                                     \
    X(hqmq)                                                                                                        \
    X(spherical)                                                                                                   \
    X(addvq)

#endif
