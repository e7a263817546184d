// Package test runs the built kmirror between real Kafka clusters, with real clients, and kills what a machine room can kill: here what
// kmirror does every day, in the packages below what one noun is about. What one package of the program can show by itself is tested there.
package test
