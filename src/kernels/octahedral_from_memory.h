/* octahedral_from_memory.h - for levels on which chunk_dots_template.h takes entries of triplets from memory and never computes
 * them. Included before it. */
#define CAN_COMPUTE false

typedef struct octahedral_table {
    int unused;
} octahedral_table;

#define load_octahedral(p) ((octahedral_table){ 0 })
#define compute_triplets(table, bits, codes, x) ((void)(x))
