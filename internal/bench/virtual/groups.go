package virtual

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
)

// Peers are the rows that stand for other products.
var Peers = []string{"consistenthash", "consistenthash-bounded", "llmd", "llmd-precise", "dynamo", "sglang"}

// Group is a section of the routing tables.
type Group struct {
	Title, About string
	Cases        []string
	Policies     []string
}

// Groups are the sections of the routing tables in their order; each of Cases is
// in one.
func Groups() []Group {
	all := slices.Concat(Policies[:len(Policies)-1], Peers, []string{Kinference, K2TTFT, K2Throughput, Oracle})
	few := slices.Concat([]string{"random", "predictedttft", "consistenthash", "llmd", "dynamo", "sglang"}, []string{Kinference, K2TTFT, Oracle})
	return []Group{
		{"Published scenarios", "What the product's document shows, with the parameters that reproduce it.", []string{"S0", "S0s", "S1", "S2"}, all},
		{"Under load", "The same at loads that fill the fleet and beyond, and with answers of all lengths (lognormal).", []string{"S1hi", "S1over", "S2hi", "S1hiln", "S2hiln"}, all},
		{"Popular prefixes and mixed prompts", "Open loops: Poisson arrivals.", []string{"S3", "S4", "ML"}, all},
		{"Other fleets", "Unequal workers, pages of 16 tokens, eight and 32 workers.", []string{"HET", "P16", "W8", "W32"}, all},
		{"Tenants", "One tenant with many streams beside three light ones, each with 0.15 requests a second.", []string{"MT", "MT2"}, all},
		{"Mooncake conversation trace", "900 requests from a place drawn from the seed, three workers with pages of 512 tokens, arrivals stretched 6 and 8.5 times.", []string{"MC", "MCm"}, all},
		{"Robustness", "Several routers, stale and wrong inputs, a slow worker, a wiped cache. S1m and S2m are the same loads without any of it.",
			[]string{"S1m", "S2m", "R4S1", "R4S2", "R4S2hi", "R2S3", "R4S1 alone", "R4S2 alone", "S2m slow", "S3 slow", "S1m wipe", "S1m stale", "S2m err"}, few},
		{"The whole Mooncake trace", "3 to 64 workers, each fleet with as many requests as it bears: arrivals stretched so that a worker has the same load in all.", []string{"MC3", "MC8", "MC16", "MC64"}, few},
	}
}

// Fingerprint changes when a case does: results of another one are not its own.
func (c Case) Fingerprint() string {
	mooncake := Mooncake{}
	if c.Mooncake != nil {
		mooncake = *c.Mooncake
	}
	c.Mooncake = nil
	sum := sha256.Sum256([]byte(fmt.Sprintf("%+v %+v", c, mooncake)))
	return hex.EncodeToString(sum[:6])
}
