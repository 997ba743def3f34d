/* specs.h - the specs that every property test and the hashes of same_bytes.txt use. A new codec
 * adds its specs here. */
#ifndef KVANT_TESTS_SPECS_H
#define KVANT_TESTS_SPECS_H

#ifndef KVANT_PAPERS /* 0 where the library was built without the papers' families */
#define KVANT_PAPERS 1
#endif

/* Entries of a list that only the papers' families have; each entry ends with its comma. */
#if KVANT_PAPERS
#define PAPERS(...) __VA_ARGS__
#else
#define PAPERS(...)
#endif

/* Together these specs reach every code path of every family. */
static const char *const all_specs[] = {
    "f32",
    "f16",
    "bf16",
    "int-2",
    "int-3",
    "int-4",
    "int-5",
    "int-6",
    "int-7",
    "int-8",
    "int-4:sym",
    "int-2:sym",
    "int-8:sym",
    "int-4:group=16",
    "int-3:group=16,sym",
    "int-4:group=24",
    "int-3:group=32,hybrid",
    "int-2:axis=channel,group=16,hybrid=code",
    "int-2:axis=channel,hybrid",
    "int-4:axis=channel",
    "int-2:axis=channel,group=16",
    "int-3:axis=channel,group=64,sym",
    "int-4:rotate=dense",
    "int-2:axis=channel,rotate=hadamard",
    "int-4:group=16,order=pairs",
    "bdr-4",
    "bdr-4:block=16",
    "bdr-4:signs=seed",
    "bdr-2:group=16",
#if KVANT_PAPERS
    "kivi-2",
    "innerq-base",
    "innerq-hybrid",
    "innerq-small:sink=0,recent=0,norm=none",
#endif
    "turboquant-1",
    "turboquant-2",
    "turboquant-3",
    "turboquant-4",
    "turboquant-5",
    "turboquant-6",
    "turboquant-7",
    "turboquant-8",
    "turboquant-4:scale=norm",
    "turboquant-3:rotate=dense",
    "turboquant-3:rotate=none",
#if KVANT_PAPERS
    "octopus-1",
    "octopus-2",
    "octopus-3",
    "octopus-4",
    "octopus-5",
    "octopus-4:round=scalar,scale=norm",
    "octopus-3:round=2x2",
    "octopus-2:round=full",
    "octopus-2:round=next",
    "octopus-3:round=next,pad=zero,scale=norm",
    "octopus-4:pad=zero",
    "octopus-4:split=7.1,rotate=none",
    "octopus-5:split=4.7,rotate=dense",
    "octopus-2:qjl",
    "turboquant-1:qjl",
    "turboquant-2:qjl",
    "turboquant-4:qjl",
    "turboquant-3:qjl,sketch=gaussian",
    "turboquant-2.5",
    "turboquant-3.5:scale=norm,rotate=hadamard",
#endif
    "trellis-2",
    "trellis-3",
    "trellis-4",
    "trellis-3:scale=norm",
    "trellis-2:rotate=none",
#if KVANT_PAPERS
    "polar-2",
    "polar-3:scale=norm",
    "polar-4",
    "polar-3.9",
    "polar-3.9:scale=norm,rotate=none",
    "hqmq-s24r3",
    "hqmq-s96r4",
    "hqmq-s170r4:scale=norm,book=random",
    "hqmq-s192r6:rotate=hadamard",
    "hqmq-s96r4:order=halves",
    "hqmq-s24r3:order=dealt,rotate=hadamard,block=16",
    "hqmq-s96r4:med3",
    "hqmq-s5r2:med=0,slots=1",
    "hqmq-s96r4:med3,median=page",
    "hqmq-s24r6:med=2,median=page,range=all,slots=8,scale=norm",
    "naive-4",
    "naive-3:med=1,range=all,slots=16",
    "spherical-r4jl4",
    "spherical-r5jl7:scale=unbiased,rotate=dense",
    "addvq-k24r3",
    "addvq-k24r3:search=greedy",
#endif
};

#endif
