// Package test runs the built kmirror between real Kafka clusters, with real clients, and kills what a machine room can kill. What one
// package can show by itself is tested there.
package test
