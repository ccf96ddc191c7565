/* A transformer's forward over a paged KV cache, in plain C: the records that inference/native.py fills, and the interface of an
 * instruction set.
 *
 * [Note: Batch invariance] Every computed element has its own accumulator, which adds its terms in a fixed order, over the input
 * features (matrices) or over positions (attention: [Note: Ranges]), whatever else is in the batch. Tiles group independent
 * accumulators; they never split one. So, with one instruction set, the logits of a token are bit-identical alone,
 * in any batch, with any chunking of the prompt, and from cached prefixes. A masked position adds 0 * value, which changes
 * nothing: the cache holds finite numbers only.
 */
#ifndef SLIPSTREAM_DECODER_H
#define SLIPSTREAM_DECODER_H

#include <stdint.h>

#define PANEL 16 /* adjacent output columns; also the positions per cache block */
#define RANGE 256 /* positions that attention sums together: [Note: Ranges]; a multiple of PANEL */
#define ROWS 6   /* rows of a tile: six accumulators of 16 lanes fill AVX2's registers, 24 those of AVX-512 */
#define PART_ROWS 192 /* a multiple of ROWS: many rows are computed in parts, which stay in the L2 cache while all strips read them;
                         parts also keep a last thread from computing a whole strip while the others wait */
#define DEPTH 96 /* features of a block of four panels, which stays in the L1 cache in fp32 */
#define CODES 32 /* features that share a scale if activations are quantized to 8 bits */
#define LINEAR_ROWS 512 /* rows of a product on its own that are computed together: their inputs stay in the caches */
#define MAX_EXPERTS 512
#define MAX_THREADS 64

enum weight_type { WEIGHT_F32 = 0, WEIGHT_BF16 = 1, WEIGHT_F16 = 2, WEIGHT_INT8 = 3, WEIGHT_INT4 = 4, WEIGHT_INT8_GROUPS = 5,
                   WEIGHT_K4 = 6, WEIGHT_K5 = 7, WEIGHT_K6 = 8 };
enum residual { RESIDUAL_BEFORE = 0, RESIDUAL_AFTER = 1, RESIDUAL_PARALLEL = 2 };

/* y = x W^T + bias. Columns are padded with zeros to a multiple of 2 * PANEL. */
struct matrix {
    const void *data; /* [panel][k][PANEL]; bf16: [panel][k / 2][PANEL][2], padded with a zero if k is odd; int8:
                         [panel][k / 4][PANEL][4]; int4: [panel][k / 8][PANEL][4] bytes, the first four k in the low halves */
    const void *scale; /* int8: fp32 [panel][PANEL]; int4, and int8 in groups: fp16 [panel][k / group][PANEL]; k-quants: see below */
    const void *low;   /* int4: fp16 as scale; w = q * scale + low. NULL: low is -8 * scale everywhere */
    const float *bias; /* fp32 [padded columns], or NULL */
    int64_t num_columns, num_features; /* int8, int4: features are padded with zeros to a multiple of CODES */
    int32_t type, group;               /* int4, and int8 in groups: a multiple of CODES */
};
/* [Note: K-quants] A block of K_BLOCK features has fp16 factors d; its groups have integer scales (int8). K6: w = d * scale * (q - 32) in
 * groups of 16 features; `scale` is [panel][k / 16][PANEL], `low` holds d: fp16 [panel][k / K_BLOCK][PANEL]. K4 and K5: w = d * scale * q
 * - d_min * minimum in groups of 32; `scale` is [panel][k / 32][2][PANEL], a group's scales and then its minima, and `low` is
 * [panel][k / K_BLOCK][2][PANEL], d and then d_min. The codes q are words of four features, as bytes [PANEL][4]; K4 stores them as int4.
 * K5 stores the 8 words of a group (32 codes of 5 bits) in 5 words, K6 its 4 words (16 codes of 6 bits) in 3: these are the group's
 * first words, in the low bits of each byte; the bits above them hold the other words. `code_word` in decoder_products.h reads them. */
#define K_BLOCK 256

/* Experts in a file, of which the most recently used are in memory. inference/on_disk.py fills it. */
struct expert_store {
    char *slots;           /* [num_slots][expert_bytes] */
    int64_t expert_bytes;  /* in a slot and in the file */
    int64_t *last_used;    /* [num_slots] the value of `clock`, which counts the layers that ran */
    int32_t *owner, *slot; /* [num_slots] the slot's expert, or -1; [experts of all layers] the expert's slot, or -1 */
    int32_t *loads;        /* [num_slots] experts of the current layer to read */
    int64_t clock, hits, misses;
    int32_t file, num_slots, num_loads, error; /* error: errno of a failed read */
};

/* The processes that compute a model, or its experts, together: each computes some columns of each product. A column is computed by one
 * process, so the results are those of a single process. inference/ranks.py fills it. */
struct ranks {
    int32_t size, index;
    int32_t lost;      /* set by another thread when a process is lost: waits end, and the forward fails */
    int32_t spins;     /* polls before a wait sleeps: few if the host has fewer cores than the processes have threads */
    uint32_t meetings; /* barriers of all processes so far, equal in all of them */
    uint32_t turn;     /* routed layers so far: they use the two buffers of outputs alternately */
    int64_t turn_size; /* elements between the two buffers; see struct routing */
    uint32_t *arrived; /* [size + 1] each process's `meetings`, then the number of sleeping processes; 64 bytes apart, in memory that all
                          processes share; NULL if they are on several hosts */
    int (*exchange)(float *rows, int64_t count); /* adds the rows of all processes. Returns nonzero after an error */
};

/* A routed MLP. The shared expert, if there is one, is the last list, which contains every row. With ranks, a matrix has only the
 * columns that this process computes, possibly none. */
struct experts {
    int32_t num, top_k, normalize, has_shared;
    int32_t by_sigmoid; /* scores are sigmoids, and a group counts by its two best; else a softmax, and a group counts by its best */
    int32_t num_groups, top_groups; /* a row uses experts of its best groups only */
    float scale;                    /* multiplies the weights of a row's experts */
    int32_t is_cut;                         /* each expert is cut into parts, one for each process */
    int64_t inner_size, shared_size, widest; /* inner features of an expert, of the shared expert, and the larger of the two */
    const int32_t *first_inner, *first_out; /* [num + has_shared] this process's first column of gate and of up, and of down */
    struct matrix *gate_up, *down; /* [num + has_shared] */
    struct expert_store *store;    /* NULL: all experts are in memory */
    const struct matrix *stored;   /* [num][gate_up, down] with offsets in the file in place of pointers; data comes first */
    int64_t first_stored;          /* index of this layer's expert 0 among the experts of all layers */
    const float *router;                 /* [num][hidden] */
    const float *bias;                   /* [num] added to scores for the choice only, or NULL */
    const float *shared_gate;            /* [hidden]; NULL: the shared expert's output has weight 1 */
};

/* weight: the multipliers, with the model's offset already added; NULL: there is no norm. bias may be NULL. */
struct norm {
    const float *weight, *bias;
};

/* The products of a layer that an adapter may add to. */
enum low_place { LOW_Q, LOW_K, LOW_V, LOW_OUT, LOW_GATE, LOW_UP, LOW_DOWN, LOW_PLACES };

/* What an adapter adds to a product: B (scale A x). inference/adapters.py fills it. */
struct low_rank {
    struct matrix a, b; /* [rank] columns, padded to PANEL only; [rank] features. WEIGHT_F32 or WEIGHT_BF16; empty: it adds nothing */
    float scale;
};

struct layer {
    struct norm input_norm, mlp_norm; /* of the inputs of attention and MLP; with RESIDUAL_PARALLEL, one without a norm has the other's */
    struct norm attn_post_norm, mlp_post_norm; /* of their outputs; with RESIDUAL_AFTER, of residual + output */
    struct norm q_norm, k_norm; /* [heads of this process][head_dim]: of each head by itself, or with qk_norm_whole of all heads together */
    struct matrix latent, q_latent; /* latent attention: x to the latent key; x to the latent of which queries are products, may be empty */
    const float *latent_norm, *q_latent_norm;
    const struct matrix *k_heads, *v_heads; /* latent attention, in place of k and v: [num_heads] W_k^T, which a query is multiplied by, and
                                               W_v, which a head's weighted sum of latents is multiplied by: see forward.c */
    struct matrix q, k, v, out, gate_up /* alternating panels of gate and up; only up if the MLP is plain */, down;
    const struct experts *experts; /* instead of gate_up and down; NULL: dense */
    const float *cosine, *sine; /* [positions][rotary_dim / 2], one table per set of frequencies, stacked; NULL: no rotation */
    void *keys;   /* [block][kv_head][head_dim][PANEL]; bf16: [...][head_dim / 2][PANEL][2] */
    void *values; /* [block][kv_head][PANEL][head_dim]; bf16: [...][PANEL / 2][head_dim][2] */
    int32_t rotary_dim, window;
};

struct decoder {
    int64_t hidden_size, intermediate_size, vocab_size;
    int64_t embed_size; /* features of the embedding and of the head's inputs; if not hidden_size, embed_in and embed_out convert */
    int64_t attended_size, keys_size; /* features of the values of all heads, and of all keys, summed over all processes */
    int64_t first_attended, first_key, first_hidden, first_inner, first_token; /* where the columns of this process begin */
    int64_t num_tokens;    /* tokens that this process embeds, from first_token on */
    int32_t num_layers, num_heads, num_kv_heads, head_dim; /* heads: of this process */
    int32_t latent_rank, q_latent_rank; /* latent sizes; 0: no latent. All heads share one key: the rotated features, then the latent */
    int32_t plain_dim, value_dim; /* latent attention: features of a query that are not rotated; features of a head's value */
    int32_t qk_norm_whole; /* the norms of q and k are over all heads together */
    int32_t cache_type; /* WEIGHT_F32 or WEIGHT_BF16 */
    int32_t embed_type; /* enum weight_type of `embed`; unused with embed_codes */
    int32_t activation; /* enum activation of vec_activation.h */
    int32_t centered;    /* norms are LayerNorm, else RMSNorm */
    int32_t residual;   /* enum residual */
    int32_t plain;      /* the MLP has no gate */
    int32_t both_ways;  /* not causal: a row attends to its whole sequence, and a batch has all rows of it */
    int32_t late_positions; /* `positions` are added after embed_in */
    int32_t own_codes;  /* each process converts its own columns of attended and act to the input type of the next product */
    float latent_eps, norm_eps, embed_scale, attn_scale, attn_softcap, logit_softcap;
    float residual_scale, logit_scale; /* multiply what is added to the residual, and the logits; 0: no factor */
    const void *embed; /* [num_tokens][embed_size] */
    const struct matrix *embed_codes; /* the quantized embedding, a token is a column; NULL: `embed` holds it */
    const float *positions, *token_types; /* [max_context][...], [types][embed_size], added to the embedding, or NULL */
    const float *slopes; /* [num_heads] of ALiBi: slope * (key's position - query's position) is added to a score; or NULL */
    struct norm embed_norm, final_norm;
    struct matrix embed_in, embed_out; /* from embed_size to hidden_size, and back; every process computes all columns; or empty */
    struct matrix head;
    const struct layer *layers;
    struct ranks *ranks; /* NULL: one process */
};

/* The rows of each expert's list. A row is copied to its place on each of its lists; [places] is num_rows *
 * (top_k + has_shared), list after list. */
struct routing {
    float *scores;  /* [num_rows][num] */
    float *shares;  /* [num_rows][top_k] the weight of each of a row's experts */
    int32_t *chosen; /* [num_rows][top_k] */
    int32_t *place; /* [num_rows][top_k + 1] */
    int32_t *first; /* [num + has_shared + 1] first place of each list */
    float *gathered, *act, *out; /* [places][hidden], [places][widest], [places][hidden]; with ranks, all processes share two buffers of
                                    `out`, and `act` if experts are cut */
};

/* Memory for rows of products' inputs, [num_rows][...]. */
struct inputs {
    int8_t *codes; /* [widest input, padded to CODES]; used if a matrix is quantized */
    float *scales; /* [2][widest / CODES]: each group's scale, then each group's sum of codes times its scale */
    int32_t *starts;  /* [2 * widest / CODES]: -32 times the sum of codes, for both halves of each group */
    uint16_t *halves; /* shaped as codes, in bf16; used if a matrix is bf16 and the instruction set has bf16 products */
};

/* One forward. Rows are tokens; a sequence's rows are adjacent, at consecutive positions. */
struct batch {
    int32_t num_rows, num_sequences, num_logits;
    int32_t first_layer, until_layer; /* the layers that this call runs. The call with the first layer embeds, that with the last
                                         computes logits; between calls, x has the rows */
    const int32_t *ids;       /* [num_rows] */
    const int32_t *first_row; /* [num_sequences + 1] */
    const int32_t *start;     /* [num_sequences] position of the first row */
    const int32_t *turns;     /* [num_sequences] the row of cosine and sine that position 0 has */
    const int32_t *tables;    /* block ids of all sequences, concatenated */
    const int32_t *table_at;  /* [num_sequences] index in tables of a sequence's first block */
    const int32_t *logit_rows; /* [num_logits] */
    const int32_t *types;      /* [num_rows] token types; NULL: all 0 */
    const struct low_rank *const *adapters; /* [num_rows] a row's adapter [num_layers][LOW_PLACES], or NULL; NULL: no row has an adapter */
    const int32_t *low_tiles; /* [num_tiles + 1] first rows of tiles: at most ROWS rows with the same adapter */
    float *low;               /* [num_rows][LOW_PLACES][low_size] scratch: scale A x */
    int64_t low_size, num_tiles; /* low_size: the largest rank of these adapters, padded to PANEL */
    float *logits;            /* [num_logits][vocab_size] */
    float *x, *normed, *qkv, *attended, *act; /* scratch: [num_rows][...] */
    float *low_q, *narrow, *mixed; /* latent attention, [num_rows][...]: the queries' latent; the queries; weighted sums of latents */
    float *added;  /* [num_rows][hidden] what is added to x, if processes cut all matrices: they share it, attended, act and logits;
                      NULL: every process computes whole rows, except those of experts */
    float *all_q, *all_k;         /* [num_rows][attended_size], [num_rows][keys_size], shared by all processes; for qk_norm_whole */
    struct inputs inputs, shared; /* `shared`: with own_codes, shared by all processes */
    struct routing routing;       /* if a layer has experts; `inputs` then has a row per place */
};

#define BLOCK_OF_SUMS 256 /* logits */

/* How to sample a token from a row. inference/sampler.py fills it. */
struct sampling {
    const float *logits;     /* [vocab_size] */
    const uint32_t *allowed; /* bit t % 32 of word t / 32: token t is allowed; NULL: all are */
    double top_p, u;         /* u: uniform in [0, 1) */
    int64_t top_k;
    float temperature, min_p; /* temperature 0: the likeliest token; of equal ones the first */
};

/* Bytes of scratch memory to sample a token. */
static inline int64_t scratch_to_choose(int64_t vocab_size)
{
    const int64_t blocks = (vocab_size + BLOCK_OF_SUMS - 1) / BLOCK_OF_SUMS;
    return (3 * blocks + 2) * BLOCK_OF_SUMS * (int64_t)sizeof(float) + blocks * (int64_t)(sizeof(double) + 3 * sizeof(float));
}

/* Several forwards of a batch with one row per sequence: the tokens drawn from one forward's logits are the rows of the next. */
struct steps {
    struct sampling *rows;  /* [num_rows] how to draw from each row of the batch's logits; each step sets their u */
    const double *u;        /* [num_steps][num_rows] */
    const int32_t *ends;    /* the tokens that end a row, row after row; a step that draws one is the last */
    const int32_t *first_end; /* [num_rows + 1] */
    const int32_t *stop;    /* another thread makes it nonzero: no further step begins */
    int32_t *ids, *start;   /* the batch's ids and start, which each step changes */
    int64_t *tokens;        /* [num_steps][num_rows] the tokens drawn; -1: a row's logits allow none, and the step is the last */
    int32_t num_steps, done;
};

/* y = x W^T + bias for rows of fp32. `batch` has the scratch memory: inputs of LINEAR_ROWS rows. */
struct linear {
    const struct matrix *w;
    const float *x;
    float *y; /* [num_rows][w->num_columns] */
    int64_t num_rows, num_features; /* of x; w may have more, padded */
    struct batch batch;
};

/* [Note: Ranges] Attention sums each range of RANGE positions, counted from 0, by itself, and then adds the ranges in order, relative to
 * the largest score so far: so the bits do not depend on which thread computes which range. A tile of queries (ROWS of one sequence and
 * key-value head) is one item of work, for one thread. If it is more than 1/MOST_OF_SHARE of a thread's share, as with one long context
 * in a small batch, each of its ranges is an item. */
#define MOST_OF_SHARE 8

/* Floats of a query's sums: [dim] weighted values, PANEL lanes that add up to the sum of the weights, the largest score and padding. */
#define SUMS(dim) ((dim) + 2 * PANEL)

static inline int64_t first_range(const struct layer *layer, const struct batch *batch, int sequence)
{
    const int64_t start = batch->start[sequence];
    return layer->window && start >= layer->window ? (start - layer->window + 1) / RANGE : 0;
}

/* The number of ranges that a sequence's rows see. */
static inline int64_t ranges_of(const struct layer *layer, const struct batch *batch, int sequence)
{
    const int64_t rows = batch->first_row[sequence + 1] - batch->first_row[sequence];
    return (batch->start[sequence] + rows - 1) / RANGE + 1 - first_range(layer, batch, sequence);
}

/* The number of tiles of a sequence's queries for one key-value head, which has `group` query heads. */
static inline int64_t tiles_of(const struct batch *batch, int sequence, int64_t group)
{
    return ((batch->first_row[sequence + 1] - batch->first_row[sequence]) * group + ROWS - 1) / ROWS;
}

/* The number of items of a sequence, if a tile with more than `most` ranges has an item for each of them. */
static inline int64_t items_of(const struct decoder *model, const struct layer *layer, const struct batch *batch, int sequence, int64_t most)
{
    const int64_t ranges = ranges_of(layer, batch, sequence), group = model->num_heads / model->num_kv_heads;
    return tiles_of(batch, sequence, group) * model->num_kv_heads * (ranges > most ? ranges : 1);
}

/* The largest number of ranges with which a tile is one item. */
static inline int64_t most_together(const struct decoder *model, const struct layer *layer, const struct batch *batch, int threads)
{
    int64_t total = 0;
    if (threads == 1)
        return INT64_MAX;
    for (int sequence = 0; sequence < batch->num_sequences; ++sequence)
        total += items_of(model, layer, batch, sequence, 0);
    const int64_t most = total / threads / MOST_OF_SHARE;
    return most > 1 ? most : 1;
}

struct team; /* the threads; see decoder.c */

struct decoder_isa {
    void (*run)(const struct decoder *, const struct batch *, struct team *, int thread, float *scratch);
    void (*linear)(const struct linear *, struct team *, int thread, float *scratch);
    int64_t (*choose)(const struct sampling *, int64_t vocab_size, float *scratch);
};

extern const struct decoder_isa decoder_portable, decoder_avx2, decoder_avx512, decoder_avx512vnni, decoder_avx512bf16;

/* The memory that a thread reads next and has not prefetched yet. */
struct ahead {
    const char *from, *until;
};

/* decoder.c */
void team_wait(struct team *, struct ahead *); /* a barrier; prefetches `ahead` while waiting */
int64_t team_next(struct team *, int stage, int thread, int64_t total); /* the next item, each once; `total` if none is left */
int team_size(const struct team *);
float *team_sums(struct team *, int64_t slot); /* the sums of a range that is an item; slots are numbered within a layer */
int team_ends(struct team *, int64_t slot, int64_t items); /* whether the caller ends the last of a tile's items; `slot`: one of theirs */
void ranks_meet(struct ranks *, struct ahead *); /* a barrier of all processes, which one thread calls; ends early if one is lost */

/* expert_store.c */
void store_claim(const struct experts *, const struct routing *); /* one thread calls it, once a layer's lists are made */
void store_read(const struct experts *, int thread, int threads);

#endif
