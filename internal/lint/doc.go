// Package lint holds rules of the repository that a compiler doesn't check, as tests: which package may import which, how
// long a function may be, what may lie at the top, and that the operations guide names every metric. It has no code of its own.
//
//	go test ./internal/lint
package lint
