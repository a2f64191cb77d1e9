package v1alpha1

// Conditions of all kinds. Each carries the observedGeneration that it speaks
// of, and a message that names what is missing or wrong.
const (
	// ConditionAccepted: the resource is valid and its fields are understood.
	//
	// Reasons when true: Accepted. When false: Invalid (the message names field
	// and fix), Conflicted (another resource, which is older, claims the same).
	ConditionAccepted = "Accepted"

	// ConditionResolvedRefs: everything that the resource refers to is there.
	//
	// Reasons when true: ResolvedRefs. When false: RefNotFound (the message
	// names each), InvalidKind, SecretInvalid (a Secret lacks a key).
	ConditionResolvedRefs = "ResolvedRefs"

	// ConditionProgrammed: every router replica serves by this generation.
	//
	// Reasons when true: Programmed. When false: Pending, Invalid (an older
	// generation is served). Unknown: a replica has not answered for a while.
	ConditionProgrammed = "Programmed"

	// ConditionCacheAware, of an InferenceWorkerSet: the prefix caches of all
	// its workers are followed exactly.
	//
	// Reasons when true: CacheAware. When false: NoEvents (engines publish none,
	// or none arrived), Lagging (events come late or have gaps), ParityTemplate,
	// ParityBlockSize, ParityHash (we and the engine see different prompts,
	// block sizes or hashes). Requests are then routed by load and estimates.
	ConditionCacheAware = "CacheAware"
)

// Reasons of the conditions above.
const (
	ReasonAccepted     = "Accepted"
	ReasonInvalid      = "Invalid"
	ReasonConflicted   = "Conflicted"
	ReasonResolvedRefs = "ResolvedRefs"
	ReasonRefNotFound  = "RefNotFound"
	ReasonInvalidKind  = "InvalidKind"
	// ReasonSecretInvalid: a Secret has not the keys that are needed.
	ReasonSecretInvalid   = "SecretInvalid"
	ReasonProgrammed      = "Programmed"
	ReasonPending         = "Pending"
	ReasonCacheAware      = "CacheAware"
	ReasonNoEvents        = "NoEvents"
	ReasonLagging         = "Lagging"
	ReasonParityTemplate  = "ParityTemplate"
	ReasonParityBlockSize = "ParityBlockSize"
	ReasonParityHash      = "ParityHash"
)
